"""Short stories with a hero, a thing, a place and a friend, along one of a few plots."""

import random

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, typed
from tests.lab.training.world import ANIMALS, NAMES, article

THINGS = (
    "lantern", "key", "kite", "drum", "bell", "map", "ring", "hat", "book", "ball", "boat", "flute", "mirror", "scarf",
    "basket", "coin", "stone", "feather", "box", "umbrella",
)  # fmt: skip
_SKILLS = ("swim", "sing", "dance", "climb", "whistle", "count to a hundred", "read", "paint", "bake a cake", "sail")
_PLACES = ("the old forest", "the quiet valley", "the small village", "the wide sea", "the green hill", "the sunny meadow",
           "the high mountain", "the big garden", "the long river", "the little island")  # fmt: skip
_TRAITS = ("little", "young", "brave", "shy", "clever", "kind", "curious", "cheerful", "sleepy", "gentle")

_START = (
    "Once upon a time, {a_hero} lived near {place}.",
    "There once was {a_hero} who lived (near|not far from) {place}.",
    "Long ago, near {place}, there lived {a_hero}.",
    "Near {place} lived {a_hero}.",
)
_LOST = (
    "(Every day|Every morning) {hero} played with (an old|a shiny|a beautiful) {thing}.",
    "The {thing} was (the best thing|the greatest treasure) in the world to {hero}.",
    "But one (windy|cold|rainy|dark) (morning|evening|day), the {thing} was gone.",
    '("Where is my {thing}?" cried {hero}.|"Oh no, my {thing}!" cried {hero}.)',
    "{Hero} looked (under the bed and behind the door|behind every tree and under every stone|up the path and down the path), "
    "but the {thing} was not there.",
    'Then {hero} met {a_friend}. ("Why are you so sad?" asked|"What is the matter?" asked) {friend}.',
    '"I have lost my {thing}," said {hero}.',
    '"(Do not worry|Do not cry), I will help you," said {friend}.',
    "(Together they looked all day long.|So the two of them searched until the sun was low.)",
    "At last {friend} saw something (shine|move) (in the tall grass|by the water|between two stones). It was the {thing}!",
    "{Hero} (jumped for joy|laughed and danced|was so happy) and held the {thing} tight.",
    '"Thank you, (my friend|dear friend)," said {hero}.',
    "(From that day on|Ever since), {hero} and {friend} (shared the {thing}|played with the {thing} together) "
    "and were the best of friends.",
)
_FOUND = (
    "One (sunny|misty|quiet) (morning|afternoon|day), {hero} went for a walk and found a {thing} (in the grass|on the path|under a tree).",
    "The {thing} was (old and dusty|small and bright|strange and beautiful).",
    '"Whose {thing} is this?" wondered {hero}.',
    "{Hero} asked {a_friend}, who was (resting in the shade|eating breakfast|looking at the clouds).",
    '"It is not my {thing}," said {friend}, "but I think it is (magic|special|lucky)."',
    "{Hero} (touched|lifted|shook) the {thing} (gently|carefully|softly), "
    "and (all at once|suddenly) a (warm|golden|silver) light filled the air.",
    '"Make a wish," whispered the {thing}.',
    "{Hero} thought for a (long|little) while. "
    '"I wish that (nobody is hungry|everybody has a friend|the rain will come|the winter will end) '
    'near {place}," said {hero}.',
    "(In the morning|The next day), the wish had come true, and {friend} (could not believe it|cheered loudly|smiled from ear to ear).",
    "{Hero} put the {thing} back (in the grass|on the path|under the tree), so that (someone else|another) could find it.",
    '"That was a good wish," said {friend}, and {hero} (smiled|felt warm inside|was proud).',
    "And if you ever find a {thing}, think of {hero} and make a good wish too.",
)
_LEARNT = (
    "More than anything, {hero} wanted to {skill}.",
    "But (each time|every time) {hero} tried to {skill}, (it went wrong|something went wrong), and {hero} (felt sad|sat down and sighed).",
    '"I will never learn to {skill}," said {hero}.',
    "(One day|One evening), {a_friend} came by with a {thing}.",
    '"I can (teach|help) you," said {friend}. "(This|My) {thing} will help us."',
    "(So|Then) {hero} took the {thing} and tried again, (slowly|one small step at a time|with closed eyes).",
    "The first day was hard. The second day was (better|easier).",
    '"Do not give up," said {friend}, and {hero} held the {thing} and went on.',
    "On the third day, (something wonderful happened|all went well): {hero} could {skill}!",
    "Everybody near {place} came to (see|watch) {hero} {skill}, and they (clapped|cheered) for a long time.",
    '"I could not have done it without you and your {thing}," said {hero} to {friend}.',
    '"You did it by yourself," said {friend}. "The {thing} was (only|just) a {thing}."',
    "And {hero} laughed, for now {hero} knew that (trying again|a good friend) is the best (magic|help) of all.",
)
_STORM = (
    "One night, a (great|terrible|wild) storm came to {place}.",
    "The wind (howled|roared) and the rain (fell and fell|would not stop), and {hero} (could not sleep|hid under a blanket).",
    "Then {hero} heard a (small|thin|far) voice: \"Help! Help!\"",
    "It was {a_friend}, (lost in the dark|stuck in the mud|trapped on a rock in the river).",
    "{Hero} was afraid, but took the {thing} and ran out into the storm.",
    "\"Hold on to the {thing}!\" called {hero}.",
    "{Friend} held on to the {thing}, and {hero} pulled and pulled with (all strength|great courage).",
    "(At last|Slowly), {friend} was free. (Together they ran home|Side by side they walked home) through the rain.",
    "{Hero} made (hot soup|warm tea|a big fire), and {friend} (stopped shaking|grew warm|smiled again).",
    "\"You and your {thing} saved me,\" said {friend}.",
    "In the morning the storm was over, and the sun (shone|came out) over {place}.",
    "{Friend} (painted|drew) a (star|heart) on the {thing}, so that {hero} would (always remember|never forget) that night.",
    "And {hero} was never afraid of a storm again.",
)  # fmt: skip
_PLOTS = (_LOST, _FOUND, _LEARNT, _STORM)

_ABOUT_BOTH = (
    "tell (me |)a (short |little |)story about {a_topic} and a {thing}.",
    "(write|make up|invent) a (short |)story about {a_topic} and a {thing}.",
    "@give a story (with|about) {a_topic} and a {thing}.",
    "a story about {a_topic} and a {thing}, please.",
    "can you tell (me |)a story (about|with) {a_topic} and a {thing}?",
    "story: {a_topic} and a {thing}.",
)
_ABOUT_HERO = (
    "tell (me |)a (short |little |nice |)story about {a_topic}.",
    "(write|make up|invent) (me |)a (short |)story about {a_topic}.",
    "can you tell (me |)a (short |)story about {a_topic}?",
    "i want (to hear |)a story about {a_topic}.",
    "a story about {a_topic}, please.",
    "(a |)bedtime story about {a_topic}.",
    "story about {a_topic}",
    "once upon a time there was {a_topic}. (go on|continue|tell me more).",
)
_ABOUT_THING = (
    "tell (me |)a (short |)story about a {thing}.",
    "(write|make up) a story about a {thing}.",
    "can you tell (me |)a story about a {thing}?",
    "story about a {thing}",
)
_ANY = (
    "tell (me |)a (short |little |nice |good |)story.",
    "can you tell (me |)a story?",
    "(write|make up|invent) (me |)a (short |)story.",
    "i want (to hear |)a story.",
    "(another|one more|a new) story, please.",
    "tell me a (bedtime|funny|long) story.",
    "story please",
    "do you know (a story|any stories)?",
)


def story(rng: random.Random) -> Turn:
    if rng.random() < 0.75:
        beast = rng.choice(ANIMALS).name
        trait = rng.choice(_TRAITS)
        topic, a_topic, hero, a_hero = beast, article(beast), f"the {trait} {beast}", article(f"{trait} {beast}")
    else:
        topic = hero = rng.choice(NAMES)
        child = rng.choice(("girl", "boy", "child"))
        a_topic = rng.choice((topic, topic, f"a {child} (named|called) {topic}"))
        a_hero = f"a {rng.choice(_TRAITS)} child named {topic}"
    thing = rng.choice(THINGS)
    asked = rng.choice((_ABOUT_BOTH, _ABOUT_BOTH, _ABOUT_HERO, _ABOUT_HERO, _ABOUT_THING, _ANY))
    question = expand(rng, expand(rng, rng.choice(asked), a_topic=a_topic, thing=thing))
    return Turn("stories", f"story/{topic}/{thing}", (user(typed(rng, question)), assistant(tell(rng, hero, a_hero, thing))))


def tell(rng: random.Random, hero: str, a_hero: str, thing: str) -> str:
    friend = rng.choice([it for it in ANIMALS if it.legs in (2, 4) and it.name not in hero])
    friendly = f"{rng.choice(('old', 'friendly', 'wise', 'big'))} {friend.name}"
    names = {
        "hero": hero,
        "Hero": _start(hero),
        "a_hero": a_hero,
        "friend": f"the {friend.name}",
        "Friend": f"The {friend.name}",
        "a_friend": article(friendly),
        "thing": thing,
        "place": rng.choice(_PLACES),
        "skill": rng.choice(_SKILLS),
    }
    sentences = (rng.choice(_START), *rng.choice(_PLOTS))
    return " ".join(_start(expand(rng, sentence, **names)) for sentence in sentences).replace(" a umbrella", " an umbrella")


def _start(text: str) -> str:
    return text[0].upper() + text[1:]
