"""The verbs of the `leeway` command, a module each.

A module has `add_parser(verbs)`, which adds its parser and names with `set_defaults(run_verb=...)` what takes the
parsed arguments and returns the exit status. What a verb needs it imports when it runs, so that `--help` is quick.

train       `leeway train`
resume      `leeway resume`
scale       `leeway scale`
status      `leeway status`
top         `leeway top`
report      `leeway report`
trace       `leeway trace`
export      `leeway export`
doctor      `leeway doctor`
check_reward `leeway check-reward`
buffer      `leeway buffer ls|show|verify|export|compact` (`buffer_text`: what it prints)
"""
