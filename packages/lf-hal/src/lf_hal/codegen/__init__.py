"""From a graph to C: layout.py, lower.py (steps), arena.py (memory), emit.py (text); the fixed C is in c/."""
