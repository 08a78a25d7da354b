"""Reports of what a finetuning step needs and why: memory, peers, capacity, text and pages."""
