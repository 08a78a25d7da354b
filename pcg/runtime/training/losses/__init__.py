"""Losses of the trainer: functions of tokens' log-probabilities, summed and never averaged."""
