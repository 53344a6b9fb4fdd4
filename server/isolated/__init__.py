"""Work on data from outside runs in separate processes, where the kernel limits its time and memory.

cpu_timer   a timer of CPU time
limits      limits of a process
job         what a process of calls does, and how each call may end
process     the process: prepares the job once, and forks for each call
calls       calls of that process from the front
files       calls that decode files of clients
held        the bytes of decoded files that requests hold
"""
