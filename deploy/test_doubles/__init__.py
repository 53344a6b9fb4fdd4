"""Models that compute nothing. Tests, and benchmarks of everything but kernels, stand on them; nothing else imports them.

model     a step model with a paged pool, whose tokens depend on every entry that it reads back
process   a worker process with that model: the real engine, scheduler and recovery
worker    what the front sees of a worker and a tokenizer, from a script, without a process
"""
