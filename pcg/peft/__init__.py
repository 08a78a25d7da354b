"""PEFT methods, one a file, and adapters: in memory, on disk, by name."""
