"""Management by Tinker's protocol: training runs, checkpoints, sessions and downloads."""
