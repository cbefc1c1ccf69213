"""Loss curves on real text: this project against stock runs, and against the noise between stock runs."""
