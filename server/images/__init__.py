"""Images of requests: decoded in a process of their own, cut into the crops that a model sees, and written into the prompt.

sizes       the sizes of an image and of its crops
cutting     scales an image to one of these sizes, and cuts it into crops
decoding    the job that decodes one image, in a process of `server.isolated`
decoder     the decoder as the front uses it
sight       what a model sees, and how images are written into its prompt
"""
