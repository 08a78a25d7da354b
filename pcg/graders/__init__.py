"""Graders: OpenAI's, which score the output of a model; as rewards and behind HTTP.

A grader is read by `reader.grader_from` and scores a `sample.Sample` by `Grader.grade`. A
`grader.GradingHost` asks judges and runs source for it.
"""
