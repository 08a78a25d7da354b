"""Facts about graphs that passes and reports share: storage, saved memory, trainables."""
