"""Graders: OpenAI's, which score what a model wrote; as rewards and behind HTTP.

A grader is read by `reader.grader_from`, scores a `sample.Sample` by `Grader.grade`, and has what
it cannot do by itself, such as asking a judge, done by a `host.GradingHost`.
"""
