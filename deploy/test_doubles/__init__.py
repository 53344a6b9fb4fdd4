"""Models that compute nothing, for tests and for benchmarks of everything but kernels. Nothing else imports them.

model     a step model with a paged pool, whose tokens depend on every entry that it reads back
process   a worker process with that model: the real engine, scheduler and recovery
worker    a scripted worker and tokenizer as the front sees them, without a process
"""
