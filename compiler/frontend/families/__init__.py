"""The families of models, a file each: fields of the configuration, the layer, names of weights."""
