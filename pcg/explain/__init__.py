"""Reports of the memory of a finetuning step, with reasons: accounts, peers, capacity, pages."""
