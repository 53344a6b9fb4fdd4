"""From a source to a model that answers. A load runs through these files in this order, and each imports only those before it:

hub         download what is missing here
locate      source -> path on this machine
files       open the files, once: configuration, headers of the weights
tokenizer   the tokenizer of the opened files
modes       which way they are served, by which program, with which pages
servable    the steps so far: refuse what cannot be served, before anything is compiled
program     compile the program, or find it in the cache
graphs      the sizes of steps that a device captures before the first request
plan        plan the memory, and refuse what does not fit
weights     prepare the weights, or find them prepared, and bind them
serving     the bound program as a model that takes steps
costs       what steps of that model take, measured or found
load        all of it, for a worker
"""
