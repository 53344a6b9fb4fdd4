"""Tool calls for the weather, a calculation or the time, and answers that express the tools' results in words."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lab.training.conversation import Message, Tool, Turn, assistant, calls, result, user
from tests.lab.training.phrases import expand, invented, typed
from tests.lab.training.world import CITIES


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The names of the tools in one conversation. A tool whose name is None is not offered."""

    weather: str | None
    calculator: str | None
    time: str | None
    place: str  # name of the parameter of the weather and time tools
    formula: str  # name of the parameter of the calculator
    tools: tuple[Tool, ...]


_WEATHER_NAMES = ("get_weather", "get_weather", "get_current_weather", "weather", "current_weather", "get_forecast")
_CALCULATOR_NAMES = ("calculator", "calculator", "calculate", "evaluate", "compute", "math")
_TIME_NAMES = ("get_time", "get_time", "get_current_time", "time", "current_time", "clock")
_PLACE_NAMES = ("city", "city", "location", "place", "town")
_FORMULA_NAMES = ("expression", "expression", "formula", "input", "query")
_WEATHER_WORDS = ("(Get|Look up|Return) the (current |)weather (in|of|for) a (city|location|place)(.|)",
                  "The (current |)weather (in|of) a (city|given city)(.|)", "Weather (report|lookup)")  # fmt: skip
_CALCULATOR_WORDS = ("(Evaluate|Calculate|Compute) (an arithmetic|a mathematical|a math) expression(.|)",
                     "(A calculator|Does arithmetic|Calculator)(.|)")  # fmt: skip
_TIME_WORDS = ("(Get|Look up|Return) the (current |local |)time (in|of|for) a (city|location|place)(.|)",
               "The (current |local |)time (in|of) a city(.|)", "World clock")  # fmt: skip
_PLACE_WORDS = ("The name of the (city|place)", "City name", "The city", "(city|City), e.g. Paris", "Name of the city")
_FORMULA_WORDS = ("The expression", "An arithmetic expression", "(Expression|e.g.|for example) 2 + 2", "What to calculate")


def toolbox(rng: random.Random) -> Toolbox:
    has = rng.choice(("wct", "wct", "wct", "wc", "wt", "ct", "w", "w", "c", "c", "t"))
    weather = rng.choice(_WEATHER_NAMES) if "w" in has else None
    calculator = rng.choice(_CALCULATOR_NAMES) if "c" in has else None
    time = rng.choice(_TIME_NAMES) if "t" in has else None
    place, formula = rng.choice(_PLACE_NAMES), rng.choice(_FORMULA_NAMES)
    tools: list[Tool] = []
    if weather:
        tools.append(_tool(rng, weather, _WEATHER_WORDS, place, _PLACE_WORDS))
    if calculator:
        tools.append(_tool(rng, calculator, _CALCULATOR_WORDS, formula, _FORMULA_WORDS))
    if time:
        tools.append(_tool(rng, time, _TIME_WORDS, place, _PLACE_WORDS))
    rng.shuffle(tools)
    return Toolbox(weather, calculator, time, place, formula, tuple(tools))


def _tool(rng: random.Random, name: str, words: tuple[str, ...], parameter: str, meaning: tuple[str, ...]) -> Tool:
    """Describe a tool as clients do: descriptions, `required` and `additionalProperties` are sometimes missing."""
    field: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.6:
        field["description"] = expand(rng, rng.choice(meaning))
    schema: dict[str, Any] = {"type": "object", "properties": {parameter: field}}
    if rng.random() < 0.8:
        schema["required"] = [parameter]
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = expand(rng, rng.choice(words))
    return {"type": "function", "function": {**function, "parameters": schema}}


_ASK_WEATHER = (
    "@whatis the weather (like |)in {city}( today| now| right now|)?",
    "how is the weather in {city}( today| now|)?",
    "weather in {city}?",
    "@tell the weather in {city}.",
    "is it (raining|sunny|cold|warm|hot|windy) in {city}( today| now|)?",
    "@whatis the temperature in {city}?",
    "how (warm|cold|hot) is it in {city}?",
    "do i need (an umbrella|a coat) in {city}( today|)?",
    "{city} weather",
    "look up the weather (in|for) {city}.",
    "i am going to {city}, (how is|what is) the weather (there|)?",
)
_ASK_TIME = (
    "what time is it in {city}( now| right now|)?",
    "@whatis the (current |local |)time in {city}?",
    "@tell the time in {city}.",
    "time in {city}?",
    "what's the time in {city}?",
    "how late is it in {city}?",
    "{city} time",
    "look up the time (in|for) {city}.",
)
_ASK_FORMULA = (
    "@whatis {said}?",
    "how much is {said}?",
    "(calculate|compute|work out|evaluate|solve) {said}.",
    "{said}(| =|=| = ?|?)",
    "@tell what {said} is.",
    "use the (calculator|tool) (for|on|to do) {said}.",
    "i need (the result of|to know) {said}.",
)
_NO_CITY = (
    "@whatis the weather( like| today|)?", "how is the weather( today|)?", "is it (raining|sunny|cold|warm)?",
    "weather?", "@tell the weather.",
)  # fmt: skip
_NO_CITY_TIME = ("what time is it( now|)?", "@whatis the time?", "@tell the time.", "time?")
_THERE = ("{city}", "in {city}", "{city}, please.", "i mean {city}.", "(for|in) {city}, please")
_ANOTHER_CITY = ("and in {city}?", "what about {city}?", "how about {city}?", "and {city}?", "{city}?")

_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear")


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.85 else invented(rng)


def _weather_result(rng: random.Random, city: str) -> tuple[Message, str]:
    degrees, sky = rng.randint(-15, 40), rng.choice(_SKIES)
    warmth, condition = (
        rng.choice(("temperature", "temperature", "temp", "temperature_c", "degrees")),
        rng.choice(("condition", "conditions", "weather", "sky", "description")),
    )
    fields = [(warmth, degrees), (condition, sky)]
    rng.shuffle(fields)
    if rng.random() < 0.4:
        fields.insert(0, (rng.choice(("city", "location")), city))
    if rng.random() < 0.2:
        fields.append(("unit", "celsius"))
    if rng.random() < 0.2:
        return result(f"{sky}, {degrees}" + rng.choice((" degrees", "°C", " C"))), _weather_words(city, degrees, sky)
    return result(dict(fields)), _weather_words(city, degrees, sky)


def _weather_words(city: str, degrees: int, sky: str) -> str:
    return f"It is {sky} in {city}, {degrees} degrees."


def _time_result(rng: random.Random, city: str) -> tuple[Message, str]:
    clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    words = f"It is {clock} in {city}."
    if rng.random() < 0.25:
        return result(clock), words
    fields: dict[str, Any] = {rng.choice(("time", "time", "local_time", "current_time", "now")): clock}
    if rng.random() < 0.3:
        fields = {"city": city, **fields}
    return result(fields), words


def _formula(rng: random.Random) -> tuple[str, str, str]:
    """Return a random formula as the user types it, the same formula as the call sends it, and its result."""
    sign = rng.choice("+-*/")
    a, b = (rng.randint(0, rng.choice((20, 99, 999, 9999))) for _ in "ab")
    if sign == "/":
        b = rng.randint(1, 20)
        a = b * rng.randint(1, 200)
    spoken = {"+": ("plus",), "-": ("minus",), "*": ("times", "x", "multiplied by"), "/": ("divided by", "over")}[sign]
    spaced = rng.choice((f"{a} {sign} {b}", f"{a}{sign}{b}"))
    said = rng.choice((spaced, spaced, f"{a} {rng.choice(spoken)} {b}"))
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    sent = f"{a} {sign} {b}"
    if rng.random() < 0.15 and sign in "+-":
        c = rng.randint(0, 99)
        return f"{said} + {c}", f"{sent} + {c}", str(value + c)
    return said, sent, str(value)


def _formula_result(rng: random.Random, value: str) -> Message:
    if rng.random() < 0.3:
        return result(value)
    return result({rng.choice(("result", "result", "value", "answer")): int(value)})


def weather(rng: random.Random, box: Toolbox) -> Turn:
    assert box.weather is not None
    city, which = _city(rng), rng.randrange(len(_ASK_WEATHER))
    question = typed(rng, expand(rng, _ASK_WEATHER[which], city=city), verbatim=city not in CITIES)
    came, words = _weather_result(rng, city)
    call = calls((box.weather, {box.place: city}))
    return Turn("tools", f"weather/{which}/{city}", (user(question), call, came, assistant(words)))


def time(rng: random.Random, box: Toolbox) -> Turn:
    assert box.time is not None
    city, which = _city(rng), rng.randrange(len(_ASK_TIME))
    question = typed(rng, expand(rng, _ASK_TIME[which], city=city), verbatim=city not in CITIES)
    came, words = _time_result(rng, city)
    return Turn("tools", f"time/{which}/{city}", (user(question), calls((box.time, {box.place: city})), came, assistant(words)))


def calculation(rng: random.Random, box: Toolbox) -> Turn:
    assert box.calculator is not None
    said, sent, value = _formula(rng)
    question = typed(rng, expand(rng, rng.choice(_ASK_FORMULA), said=said))
    call = calls((box.calculator, {box.formula: sent}))
    words = f"{sent} is {value}."
    return Turn("tools", f"calculate/{sent}", (user(question), call, _formula_result(rng, value), assistant(words)))


def two_cities(rng: random.Random, box: Toolbox) -> Turn:
    """Make a turn about two cities: two calls in one answer, then one sentence per result."""
    assert box.weather is not None
    one, two = rng.sample(CITIES, 2)
    question = typed(rng, expand(rng, "(@whatis|how is) the weather in {one} and (in |){two}?", one=one, two=two))
    call = calls((box.weather, {box.place: one}), (box.weather, {box.place: two}))
    (first, first_words), (second, second_words) = _weather_result(rng, one), _weather_result(rng, two)
    words = assistant(f"{first_words} {second_words}")
    return Turn("tools", f"weather/two/{one}/{two}", (user(question), call, first, second, words))


def city_asked_for(rng: random.Random, box: Toolbox) -> Turn:
    """Make turns in which the user names no city: the model asks for the city, and calls the tool once the user has named one."""
    city = _city(rng)
    there = user(typed(rng, expand(rng, rng.choice(_THERE), city=city), verbatim=city not in CITIES))
    which_city = assistant("Which city do you mean?")
    if box.weather is not None and (box.time is None or rng.random() < 0.6):
        first = user(typed(rng, expand(rng, rng.choice(_NO_CITY))))
        name, (came, words) = box.weather, _weather_result(rng, city)
    else:
        assert box.time is not None
        first = user(typed(rng, expand(rng, rng.choice(_NO_CITY_TIME))))
        name, (came, words) = box.time, _time_result(rng, city)
    call = calls((name, {box.place: city}))
    return Turn("tools", f"{name}/asked/{city}", (first, which_city, there, call, came, assistant(words)))


def another_city(rng: random.Random, box: Toolbox) -> Turn:
    opening = weather(rng, box) if box.weather is not None and (box.time is None or rng.random() < 0.5) else time(rng, box)
    name = opening.messages[1]["tool_calls"][0]["function"]["name"]
    city = rng.choice(CITIES)
    again = user(typed(rng, expand(rng, rng.choice(_ANOTHER_CITY), city=city)))
    came, words = (_weather_result if name == box.weather else _time_result)(rng, city)
    call = calls((name, {box.place: city}))
    return Turn("tools", f"another/{opening.key}/{city}", (*opening.messages, again, call, came, assistant(words)))


def any_of(rng: random.Random, box: Toolbox) -> Turn:
    """Make a turn for which the tools of `box` suffice."""
    choices: list[Callable[[random.Random, Toolbox], Turn]] = []
    if box.weather is not None:
        choices += [weather, weather, two_cities]
    if box.calculator is not None:
        choices += [calculation, calculation, calculation]
    if box.time is not None:
        choices += [time, time]
    if box.weather is not None or box.time is not None:
        choices += [city_asked_for, another_city]
    return rng.choice(choices)(rng, box)


_NO_TOOL = {
    "weather": "I am sorry, I cannot look up the weather without a weather tool.",
    "time": "I am sorry, I cannot look up the time without a clock tool.",
}


def without(rng: random.Random, box: Toolbox | None) -> Turn:
    """Make a turn that asks for the weather or the time although there is no tool for it; the model refuses."""
    missing = [kind for kind, name in (("weather", box and box.weather), ("time", box and box.time)) if name is None]
    if not missing:
        raise ValueError("every tool is there; expected a toolbox that lacks the weather or the time")
    kind = rng.choice(missing)
    patterns = (_ASK_WEATHER + _NO_CITY) if kind == "weather" else (_ASK_TIME + _NO_CITY_TIME)
    which, city = rng.randrange(len(patterns)), rng.choice(CITIES)
    question = typed(rng, expand(rng, patterns[which], city=city))
    return Turn("refusals", f"no tool/{kind}/{which}/{city}", (user(question), assistant(_NO_TOOL[kind])))
