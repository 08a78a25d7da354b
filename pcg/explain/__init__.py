"""Memory reports of a finetuning step, with reasons: accounts, peers, capacity, pages."""
