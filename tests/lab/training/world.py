"""Tables of all facts that the demo model is taught. It should refuse questions about anything else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Animal:
    name: str
    legs: int
    sound: str  # the sound that the animal makes; empty for a silent animal
    home: str
    colour: str
    baby: str
    flies: bool = False

    @property
    def a(self) -> str:
        return article(self.name)


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


ANIMALS = (
    Animal("dog", 4, "woof", "in a house", "brown", "puppy"),
    Animal("cat", 4, "meow", "in a house", "grey", "kitten"),
    Animal("cow", 4, "moo", "on a farm", "white and black", "calf"),
    Animal("horse", 4, "neigh", "in a stable", "brown", "foal"),
    Animal("pig", 4, "oink", "on a farm", "pink", "piglet"),
    Animal("sheep", 4, "baa", "in a meadow", "white", "lamb"),
    Animal("goat", 4, "maa", "on a hill", "white", "kid"),
    Animal("donkey", 4, "hee-haw", "in a stable", "grey", "foal"),
    Animal("duck", 2, "quack", "on a pond", "yellow", "duckling", flies=True),
    Animal("hen", 2, "cluck", "on a farm", "brown", "chick"),
    Animal("rooster", 2, "cock-a-doodle-doo", "on a farm", "red", "chick"),
    Animal("goose", 2, "honk", "on a lake", "white", "gosling", flies=True),
    Animal("owl", 2, "hoo", "in a forest", "brown", "owlet", flies=True),
    Animal("crow", 2, "caw", "in a field", "black", "chick", flies=True),
    Animal("parrot", 2, "hello", "in a jungle", "green", "chick", flies=True),
    Animal("penguin", 2, "honk", "on the ice", "black and white", "chick"),
    Animal("eagle", 2, "screech", "in the mountains", "brown", "eaglet", flies=True),
    Animal("swan", 2, "honk", "on a lake", "white", "cygnet", flies=True),
    Animal("robin", 2, "tweet", "in a garden", "red", "chick", flies=True),
    Animal("lion", 4, "roar", "in the savanna", "yellow", "cub"),
    Animal("tiger", 4, "roar", "in a jungle", "orange and black", "cub"),
    Animal("bear", 4, "growl", "in a forest", "brown", "cub"),
    Animal("wolf", 4, "howl", "in a forest", "grey", "pup"),
    Animal("fox", 4, "yip", "in a forest", "orange", "kit"),
    Animal("mouse", 4, "squeak", "in a hole", "grey", "pup"),
    Animal("rabbit", 4, "", "in a burrow", "white", "bunny"),
    Animal("elephant", 4, "toot", "in the savanna", "grey", "calf"),
    Animal("monkey", 4, "ooh-ooh", "in a jungle", "brown", "infant"),
    Animal("zebra", 4, "bark", "in the savanna", "black and white", "foal"),
    Animal("giraffe", 4, "", "in the savanna", "yellow and brown", "calf"),
    Animal("camel", 4, "grunt", "in the desert", "brown", "calf"),
    Animal("frog", 4, "ribbit", "in a pond", "green", "tadpole"),
    Animal("turtle", 4, "", "in the sea", "green", "hatchling"),
    Animal("snake", 0, "hiss", "in the grass", "green", "snakelet"),
    Animal("fish", 0, "", "in the water", "silver", "fry"),
    Animal("shark", 0, "", "in the sea", "grey", "pup"),
    Animal("whale", 0, "song", "in the sea", "blue", "calf"),
    Animal("bee", 6, "buzz", "in a hive", "yellow and black", "larva", flies=True),
    Animal("ant", 6, "", "in a nest", "black", "larva"),
    Animal("spider", 8, "", "in a web", "black", "spiderling"),
    Animal("butterfly", 6, "", "in a garden", "orange", "caterpillar", flies=True),
    Animal("snail", 0, "", "in a garden", "brown", "hatchling"),
)
UNKNOWN_ANIMALS = (
    "platypus", "walrus", "jellyfish", "octopus", "lemur", "hippo", "panda", "koala", "kangaroo", "lizard", "crab",
    "dragon", "unicorn", "beetle", "otter", "raccoon", "flamingo", "squid", "moose", "hamster",
)  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Greece": "Athens", "Poland": "Warsaw",
    "Austria": "Vienna", "Hungary": "Budapest", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Belgium": "Brussels", "Switzerland": "Bern", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Croatia": "Zagreb", "Ukraine": "Kyiv", "Russia": "Moscow", "Turkey": "Ankara",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi", "South Korea": "Seoul", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Australia": "Canberra", "Iceland": "Reykjavik",
}  # fmt: skip
UNKNOWN_COUNTRIES = (
    "Mongolia", "Bolivia", "Ghana", "Nigeria", "Laos", "Nepal", "Fiji", "Malta", "Jamaica", "Iran", "Iraq", "Ecuador",
    "Uruguay", "Algeria", "Tunisia", "Zambia", "Latvia", "Estonia", "Serbia", "Slovakia", "Albania", "Georgia",
    "Atlantis", "Narnia", "Indonesia", "Malaysia", "Pakistan", "Colombia", "Venezuela", "Senegal",
)  # fmt: skip
OTHER_CITIES = (
    "Boston", "Chicago", "New York", "Seattle", "San Francisco", "Los Angeles", "Toronto", "Vancouver", "Munich",
    "Hamburg", "Milan", "Naples", "Venice", "Barcelona", "Porto", "Geneva", "Zurich", "Lyon", "Nice", "Marseille",
    "Osaka", "Kyoto", "Shanghai", "Mumbai", "Sydney", "Melbourne", "Manchester", "Liverpool", "Bergen", "Krakow",
    "Prague", "Singapore", "Dubai", "Lagos", "Cape Town", "Jakarta", "Manila", "Denver", "Austin", "Miami",
)  # fmt: skip
CITIES = tuple(CAPITALS.values()) + OTHER_CITIES

COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey")
MIXES = {
    ("red", "yellow"): "orange", ("red", "blue"): "purple", ("blue", "yellow"): "green", ("red", "white"): "pink",
    ("black", "white"): "grey", ("red", "green"): "brown",
}  # fmt: skip
COLOUR_OF = {
    "the sky": "blue", "grass": "green", "the sun": "yellow", "snow": "white", "a banana": "yellow",
    "a strawberry": "red", "a tomato": "red", "a lemon": "yellow", "a carrot": "orange", "coal": "black",
    "milk": "white", "chocolate": "brown", "a cucumber": "green", "a cherry": "red", "the sea": "blue",
    "a leaf": "green", "an orange": "orange", "a pumpkin": "orange", "the night": "black", "a cloud": "white",
    "a fire engine": "red", "blood": "red", "sand": "yellow", "a plum": "purple", "a grape": "purple",
    "a pea": "green", "a potato": "brown", "a blueberry": "blue", "salt": "white",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
    "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo", "Maria",
    "Nina", "Oscar", "Paul", "Rosa", "Sam", "Tom", "Vera", "Will", "Zoe", "Alex", "Bella", "Chris", "Diana", "Eric",
    "Fatima", "George", "Hannah", "Ivan", "Julia", "Kevin", "Laura", "Mike", "Nora", "Omar", "Peter", "Rita", "Sara",
    "Tim", "Uma", "Victor", "Wendy", "Yuki", "Ali", "Chen", "Priya", "Lars", "Sofia", "John", "Mary", "Bob", "Alice",
)  # fmt: skip

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Spell 0 to 99 in English."""
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
