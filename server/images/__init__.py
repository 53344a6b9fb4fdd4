"""Images of requests: decoded in a process of their own, cut into the crops that a model sees, and written into the prompt.

cutting     the sizes of an image and of its crops
decoding    the job that decodes one image, in a process of `server.isolated`
decoder     the decoder as the front uses it
sight       what a model sees, and how images are written into its prompt
"""
