"""Load a model from its source, so that it can answer requests. A load runs these files in this order; each file imports only earlier ones:

held        describe a downloaded model
hub         download models from the hub
packages    download models that are packages of a package index
origins     choose between these two
locate      resolve the source to a path on this machine
files       open the files once: configuration, headers of the weights
tokenizer   read the tokenizer from the opened files
modes       choose how the model is served: its program, its bounds, its pages
abilities   say what the model serves: text, embeddings, scores, classes
facts       say what the files hold: family, number of parameters, type of the weights
servable    run the steps so far, and refuse what cannot be served before anything is compiled
program     compile the program, or find it in the cache
graphs      list the step sizes that a device captures before the first request
plan        plan the memory, and refuse what does not fit
row_bits    check that a GPU gives a row the same bits in every batch
weights     prepare the weights, or find them prepared, and bind them
serving     wrap the bound program as a model that takes steps
costs       measure how long steps of the model take, or read an earlier measurement
load        run all steps, in a worker
"""
