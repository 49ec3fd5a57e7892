"""What servers do with a push, and what else an object is made with.

`rule` has the base of all rules and those without numbers, `optimizers` those that follow a gradient. `schedule` is for
step sizes, `init` makes first values, `sync` is the consistency policy. `user_rules`, `torch_rule` and `functions` are
for the user's own code; `user_code` runs it on a server.
"""
