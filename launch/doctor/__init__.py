"""`leeway doctor`: is this machine fit for a run? Every look is bounded in time, and none is ever a traceback.

checkup     the table of checks; those of what is installed, and of what it talks to
machine     what the machine has, and which processes dead runs left on it; examine: checks side by side, each in
            a process of its own, with its limit
"""
