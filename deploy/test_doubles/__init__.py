"""Models that compute nothing, for tests and for benchmarks of everything but kernels. Nothing else imports them.

model     a step model with a paged cache; each of its tokens depends on every cache entry that the model reads
process   a worker process that runs this model with the real engine, scheduler and recovery
worker    a scripted worker and a tokenizer that run inside the front, without a worker process
"""
