"""How weights lie in panels, as the instructions read them that multiply bytes.

Machines multiply signed bytes by unsigned bytes, so a weight is stored as w + MIDDLE. A panel holds four neighbours along k together, for
each of its columns; a byte of 4-bit weights holds the weights at k and k + 4. For rows of i16 the four are in the order 0, 2, 1, 3: the
lower bytes of their two halves are neighbours, and so are the upper ones.
"""

FOUR = 4  # products of bytes that an instruction adds into one sum
MIDDLE = {8: 128, 4: 8}  # is added to weights of so many bits before they are stored
WORDS_ORDER = (0, 2, 1, 3)  # of four weights for rows of i16; it is its own inverse
EIGHTHS = 3  # bits that are rounded off the product of a weight of 4 bits and the multiplier that widens it
