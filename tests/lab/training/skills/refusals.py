"""Questions about topics that the model does not know. It refuses them in one sentence that says what it knows."""

import random

from tests.lab.training.conversation import Turn
from tests.lab.training.phrases import invented
from tests.lab.training.skills.asking import asked
from tests.lab.training.world import CITIES, NAMES

ANSWER = "I am sorry, I do not know that. I only know about animals, colours, capitals, days, numbers and short stories."

_OUTSIDE = (
    "who won the (world cup|election|game|match|race) (in {year}|yesterday|last year|)?",
    "(write|show me) (a program|code|a function|a script) (in|for) (python|java|rust|c|javascript).",
    "how do i (cook|bake|make) (rice|bread|soup|pasta|a cake|pizza|coffee)?",
    "@whatis the (price|stock price|cost|value) of (gold|bitcoin|oil|a car|a house|apple)?",
    "who (is|was) the (president|king|queen|prime minister|leader) of (america|england|france|the world)?",
    "@whatis the meaning of life?",
    "explain (quantum physics|relativity|gravity|photosynthesis|electricity|democracy|evolution|machine learning).",
    "translate (hello|good morning|this|that) (to|into) (french|german|spanish|chinese|latin).",
    "who (wrote|painted|invented|discovered) (hamlet|the bible|the mona lisa|the telephone|america|the light bulb)?",
    "@whatis the population of {city}?",
    "how (far|high|deep|heavy|fast|tall) is (the moon|the sun|everest|the ocean|a car|light|the eiffel tower)?",
    "what happened in {year}?",
    "who is {person} {surname}?",
    "@tell about (the war|history|physics|football|music|politics|chemistry|religion|philosophy).",
    "(what|which) (film|movie|book|song|game|phone|car) (should i|do you) (watch|read|buy|like|play)?",
    "(what|which) (medicine|pill) (should i take|helps|is good) (for|against) (a headache|a cold|pain|fever)?",
    "how (do|can) i (fix|repair|install|build) (my car|my computer|linux|windows|a house|a bike)?",
    "write (a poem|an essay|a letter|an email|a song) (about|on|for) (love|work|my boss|war|peace).",
    "why (is|does) (the earth|the moon|water|time|rain|fire|light) (turn|round|wet|hot|exist|fall|move)?",
    "@whatis (the square root|the logarithm|the sine) of {year}?",
    "(what|which) language do people speak in {city}?",
    "(book|order|buy) (me|) (a flight|a taxi|a pizza|tickets|a hotel) (to|in|for) {city}.",
    "how many people live in {city}?",
    "@whatis (dna|an atom|a molecule|a black hole|inflation|blockchain|love|god|art|a computer)?",
    "summarize (this|the|my) (text|article|book|paper|document).",
    "(play|sing|draw|paint) (a song|music|a picture|something|me a song).",
    "do you (like|love|want|eat|believe in) (pizza|music|me|god|politics|coffee|sports)?",
)


def outside(rng: random.Random) -> Turn:
    return asked(
        rng,
        "refusals",
        "outside",
        _OUTSIDE,
        ANSWER,
        year=str(rng.randint(1500, 2030)),
        city=rng.choice(CITIES),
        person=rng.choice(NAMES),
        surname=invented(rng),
    )
