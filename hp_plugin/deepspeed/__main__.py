"""``python -m hp_plugin.deepspeed SCRIPT ARGS...``; see ``launcher``. Keep this module free of names."""

if __name__ == "__main__":
    import hp_plugin.deepspeed.launcher

    hp_plugin.deepspeed.launcher.main()
