"""Load a model from its source, so that it can answer requests. Each file imports only earlier ones of this list. `stages.py` lists the
stages of a load: each is a function that takes the state of the load and returns it with further fields.

known       say what a load begins with, and how stages add to it
held        describe a downloaded model
hub         download models from the hub
packages    download models that are packages of a package index
origins     choose between `hub` and `packages`
locate      resolve the source to a path on this machine
made_tokenizer  make tokenizer files from a GGUF file
tokenizer   read the tokenizer from the opened files
files       open the files once: configuration, headers of the weights
facts       describe the contents of the files: family, number of parameters, type of the weights
modes       choose how the model is served: its program, its bounds, its pages
servable    refuse what cannot be served before anything is compiled; say what the model serves
program     compile the program, or find it in the cache
row_bits    check that a GPU gives a row the same bits in every batch
compiled    compile the program of a model for the machine that runs it
fingerprint  name what the model computes: program, files and numeric class
graphs      list the step sizes that a device captures before the first request
plan        open the device and plan the memory, and refuse what does not fit
weights     prepare the weights, or find them prepared, and bind them
patches     arrange crops of images as inputs of their encoder
excerpts    encode excerpts of images or recordings in parts, and keep the rows of those used last
seeing      encode crops of images
listening   encode clips of recordings
serving     wrap the bound program as a model that takes steps
costs       measure how long steps of the model take, or read an earlier measurement
description  describe the model to the front
stages      run the stages that a command needs
load        run all stages in a worker
"""
