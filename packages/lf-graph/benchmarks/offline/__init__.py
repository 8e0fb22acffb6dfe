"""What compile_offline.py is made of: launches written down without a GPU, compiled for one, and read.

``cases`` call the operators as the models do; ``launches`` notes what they would launch; ``compiled`` compiles a launch
and counts what the compiler made of it.
"""
