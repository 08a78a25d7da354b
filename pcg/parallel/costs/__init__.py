"""Costs of operators and collectives: data sheets, profiles, layers and steps."""
