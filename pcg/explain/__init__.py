"""What a finetuning step needs and why: memory accounts, peers, capacity, reports and pages."""
