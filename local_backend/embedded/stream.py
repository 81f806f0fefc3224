"""Which coordinates of the embedded model's residual stream hold what, and at which scale.

The circuits write and read them (:mod:`~local_backend.embedded.circuits`); what is left is training's.
"""

from __future__ import annotations

# The residual stream's coordinates. First a token's own code, in which what stands from 20 to 58 is the same
# for a word in any case, behind a space or not; then notes on the five tokens before it; what tells the
# sentence it is in from others; the same of the sentence where its word stood before, which becomes that of
# the sentence to quote; at last single coordinates, and what is left to training.
HIDDEN_SIZE, NUM_HEADS, HEAD_SIZE, NUM_LAYERS = 380, 5, 64, 6
OWN, WORD, UNIQUE = slice(0, 96), slice(20, 58), slice(58, 96)
BEFORE = (slice(96, 134), slice(134, 158), slice(158, 170), slice(170, 178), slice(178, 186))
OF_SENTENCE = slice(186, 228)
OF_FOUND = slice(228, 270)
RARITY_AT, FOUND_AT, NOTHING_AT, ENDS_AT, CUE_AT, CONSTANT_AT = range(270, 276)
PLACE_AT = (276, 277, 278)  # whether the token is the first, the second, the third of a sentence
CUED_AT = (279, 280, 281)  # whether the first, the second, the third token of a quotation comes next
# Of requests to change an answer; where it takes two notes to be sure, a flag counts them. Words before a
# heading that is to be added; whether a token is the first of that heading, whether its second or third;
# words that ask for less; whether a token ends such a request. Of answers: what opens a point's heading.
ADDS_AT, ADDED_AT, ADDED_ON_AT, SHORTENS_AT, SHORTENED_AT, OPENING_AT = range(282, 288)
BALLAST_AT = 288
FREE = slice(289, HIDDEN_SIZE)
# The last layer looks for the place where the last five tokens stood before. Of each token, from the present
# one back, it compares so many coordinates: of the first two, one head these and the other the next as many.
MATCHED = (9, 8, 8, 5, 4)
# So many of each note; the others are read by layer 2 at the latest.
COMPARED_LAST = (2 * MATCHED[0], 2 * MATCHED[1], *MATCHED[2:])
# The last layer whose circuits read a coordinate.
READ_UNTIL = (
    (OWN, 5),
    *((slice(note.start, note.start + count), 5) for note, count in zip(BEFORE, COMPARED_LAST, strict=True)),
    *((slice(note.start + count, note.stop), 2) for note, count in zip(BEFORE, COMPARED_LAST, strict=True)),
    (slice(OF_SENTENCE.start, CUED_AT[0]), 5),
    (slice(CUED_AT[0], CUED_AT[1]), NUM_LAYERS),  # by the output head
    (slice(CUED_AT[1], BALLAST_AT), 5),
    (slice(BALLAST_AT, FREE.start), NUM_LAYERS),
)

CODE = 0.37  # of every coordinate of a token's own code, with a random sign
FLAG = 1.2
ASKING = 0.4  # of the flag, that of a word that asks for less: of two or three such words none is an end
EMBEDDING_NORM = 0.27  # root mean square of an embedding without its ballast
# A coordinate of its own makes all tokens nearly equally long in every layer, whatever training writes beside
# the circuits: the norms then divide by a constant, and what was written is read at the scale it was meant.
BALLAST = 40.0
READ = 2.5  # what is read is so many times what was written
NOTED = 1.5  # how much a token counts in the notes on it
CONSTANT_READ = READ * FLAG
NOTHING_READ = READ * EMBEDDING_NORM * HIDDEN_SIZE**0.5  # of the one coordinate of "nothing"
