"""The lab: the experiments of the paper, each one command. Needs the extra `lab`.

`inspect` and `convert` need the smaller extra `files`.
"""
