"""OpenAI's graders, which score the output of a model; used as rewards and behind HTTP.

`reader.grader_from` reads a grader, and `Grader.grade` scores a `sample.Sample`. A
`grader.GradingHost` calls judges and runs source code for graders.
"""
