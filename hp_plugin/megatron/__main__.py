"""``python -m hp_plugin.megatron SCRIPT ARGS...``; see ``launcher``. Keep this module free of names."""

if __name__ == "__main__":
    import hp_plugin.megatron.launcher

    hp_plugin.megatron.launcher.main()
