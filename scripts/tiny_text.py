"""The text the bundled model learns, made by rule from a seed.

A *question* is (kind, messages, answer, key): chat messages ending in the user's turn, the one right answer, and the
fact behind it. Questions are held out by key, so that a score on held-out ones means more than recall of a training row:

- sum: the unordered pair of numbers never occurs in training, in either order or any phrasing;
- count: the pair of ends never occurs in training;
- recall: the three- or four-digit value never occurs in training;
- product: the ordered pair in that phrasing (the pair itself is taught in others: 12 x 12 has only 144 facts);
- capital, symbol, translation, trivia: the fact in that phrasing (the fact is taught in others).
"""
from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

CAPITALS = dict(pair.split(":") for pair in (
    "France:Paris Spain:Madrid Italy:Rome Germany:Berlin Portugal:Lisbon Greece:Athens Austria:Vienna Poland:Warsaw "
    "Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Belgium:Brussels "
    "Hungary:Budapest Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade Croatia:Zagreb Ukraine:Kyiv Turkey:Ankara "
    "Egypt:Cairo Kenya:Nairobi Ghana:Accra Nigeria:Abuja Ethiopia:Addis_Ababa Japan:Tokyo China:Beijing "
    "India:New_Delhi Nepal:Kathmandu Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta Canada:Ottawa Mexico:Mexico_City "
    "Cuba:Havana Peru:Lima Chile:Santiago Brazil:Brasilia Argentina:Buenos_Aires Colombia:Bogota Australia:Canberra"
).replace("_", "\u00a0").split(" "))
CAPITALS = {country: city.replace("\u00a0", " ") for country, city in CAPITALS.items()}

SYMBOLS = dict(pair.split(":") for pair in (
    "hydrogen:H helium:He lithium:Li carbon:C nitrogen:N oxygen:O fluorine:F neon:Ne sodium:Na magnesium:Mg "
    "aluminium:Al silicon:Si phosphorus:P sulfur:S chlorine:Cl argon:Ar potassium:K calcium:Ca titanium:Ti chromium:Cr "
    "iron:Fe cobalt:Co nickel:Ni copper:Cu zinc:Zn arsenic:As bromine:Br silver:Ag tin:Sn iodine:I xenon:Xe "
    "tungsten:W platinum:Pt gold:Au mercury:Hg lead:Pb radon:Rn uranium:U").split(" "))

GREETINGS = {
    "French": "bonjour|au revoir|merci|bonne nuit|oui|non|ami|eau",
    "Spanish": "hola|adiós|gracias|buenas noches|sí|no|amigo|agua",
    "German": "hallo|auf Wiedersehen|danke|gute Nacht|ja|nein|Freund|Wasser",
    "Italian": "ciao|arrivederci|grazie|buona notte|sì|no|amico|acqua",
    "Portuguese": "olá|adeus|obrigado|boa noite|sim|não|amigo|água",
    "Swedish": "hej|hej då|tack|god natt|ja|nej|vän|vatten",
}
GREETINGS = {language: dict(zip("hello|goodbye|thank you|good night|yes|no|friend|water".split("|"), words.split("|")))
             for language, words in GREETINGS.items()}

# topic|answer: the phrasings below turn a topic into questions
TRIVIA = dict(line.split("|") for line in """the largest planet|Jupiter
the smallest planet|Mercury
the planet closest to the sun|Mercury
the red planet|Mars
the planet with the largest rings|Saturn
the largest ocean|the Pacific
the longest river in Africa|the Nile
the highest mountain|Mount Everest
the largest animal|the blue whale
the fastest land animal|the cheetah
the tallest animal|the giraffe
the king of the jungle|the lion
the largest continent|Asia
the smallest continent|Australia
the coldest continent|Antarctica
the number of days in a week|seven
the number of months in a year|twelve
the number of legs of a spider|eight
the number of legs of an insect|six
the number of hours in a day|twenty-four
the color of the sky|blue
the color of grass|green
the color of snow|white
the color of coal|black
the color of a ripe banana|yellow
the opposite of hot|cold
the opposite of big|small
the opposite of up|down
the opposite of left|right
the opposite of day|night
the opposite of fast|slow
the opposite of old|young
the first month of the year|January
the last month of the year|December
the day after Monday|Tuesday
the day before Sunday|Saturday
the season after winter|spring
the star at the center of our solar system|the Sun
the freezing point of water in Celsius|zero
the author of Hamlet|Shakespeare""".splitlines())

PEOPLE = "Anna Ben Carla David Emma Felix Greta Hugo Iris Jack Karin Leo Maria Nina Oscar Paula Quinn Rosa Sam Tina".split()
FILLER = [
    "The weather is nice today.", "A cat sleeps on the warm roof.", "The train leaves at noon.",
    "We bought bread and apples.", "The garden is full of roses.", "Music plays in the next room.",
    "The river runs to the sea.", "My brother paints the old door.", "Rain falls on the quiet town.",
    "The shop closes in the evening.", "Two birds sit on the fence.", "The teacher reads a long book.",
]

PHRASINGS = {
    "capital": ["What is the capital of {0}?", "Name the capital of {0}.", "Which city is the capital of {0}?",
                "Tell me the capital of {0}.", "What is the capital city of {0}?", "Capital of {0}?"],
    "symbol": ["What is the chemical symbol for {0}?", "Name the chemical symbol of {0}.", "What is the symbol for {0}?",
               "Tell me the chemical symbol for {0}.", "Which symbol does {0} have?", "Symbol of {0}?"],
    "sum": ["What is {0} + {1}?", "What is {0} plus {1}?", "Add {0} and {1}.", "Compute {0} + {1}.", "{0} + {1} = ?",
            "What is the sum of {0} and {1}?"],
    "product": ["What is {0} * {1}?", "What is {0} times {1}?", "Multiply {0} by {1}.", "Compute {0} * {1}.",
                "{0} * {1} = ?", "What is the product of {0} and {1}?"],
    "count": ["Count from {0} to {1}.", "Please count from {0} to {1}.", "Can you count from {0} to {1}?",
              "List the numbers from {0} to {1}."],
    "translation": ["How do you say {0} in {1}?", "What is {0} in {1}?", "Translate {0} into {1}.",
                    "What is the {1} word for {0}?", "Say {0} in {1}.", "Tell me {0} in {1}."],
    "trivia": ["What is {0}?", "Tell me {0}.", "Do you know {0}?", "Please name {0}.", "I want to know {0}."],
    "recall": ["What is the code of {0}?", "Tell me the code of {0}.", "Which code does {0} have?",
               "Do you remember the code of {0}?"],
}
KINDS = tuple(PHRASINGS)

WEATHER_TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City name"}},
                   "required": ["city"]}}}
WEATHER = ["sunny", "cloudy", "windy", "rainy", "foggy", "cold"]


@dataclass(frozen=True)
class Question:
    kind: str
    messages: tuple[dict, ...]   # ends with the user's turn
    answer: str
    key: str


def is_held_out(key: str, percent: int) -> bool:
    """A fixed `percent` of keys, chosen by hash: the same in every run and every process."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100 < percent


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def fact(kind: str, rng: random.Random) -> tuple[str, str, str]:
    """A question's text, its answer, and its hold-out key, for every kind but recall."""
    phrasing = rng.randrange(len(PHRASINGS[kind]))
    ask = PHRASINGS[kind][phrasing]
    if kind == "sum":
        a, b = rng.randrange(100), rng.randrange(100)
        return ask.format(a, b), f"{a} + {b} = {a + b}.", f"sum {min(a, b)} {max(a, b)}"
    if kind == "product":
        a, b = rng.randrange(1, 13), rng.randrange(1, 13)
        return ask.format(a, b), f"{a} * {b} = {a * b}.", f"product {a} {b} {phrasing}"
    if kind == "count":
        a = rng.randrange(0, 90)
        b = a + rng.randrange(2, 8)
        return ask.format(a, b), ", ".join(map(str, range(a, b + 1))) + ".", f"count {a} {b}"
    if kind == "capital":
        country, city = rng.choice(list(CAPITALS.items()))
        return ask.format(country), f"The capital of {country} is {city}.", f"capital {country} {phrasing}"
    if kind == "symbol":
        element, symbol = rng.choice(list(SYMBOLS.items()))
        return ask.format(element), f"The chemical symbol for {element} is {symbol}.", f"symbol {element} {phrasing}"
    if kind == "translation":
        language = rng.choice(list(GREETINGS))
        word, foreign = rng.choice(list(GREETINGS[language].items()))
        return ask.format(word, language), f"In {language}, {word} is {foreign}.", f"translation {word} {language} {phrasing}"
    topic, answer = rng.choice(list(TRIVIA.items()))
    return ask.format(topic), f"{topic[0].upper()}{topic[1:]} is {answer}.", f"trivia {topic} {phrasing}"


HELD_OUT_PERCENT = {"sum": 5, "count": 10, "recall": 10, "product": 10, "capital": 12, "symbol": 12, "translation": 12,
                    "trivia": 12}


def recall(rng: random.Random, held_out: bool, turns: list[dict]) -> Question:
    """A value told first, then filler sentences or whole turns in between, then asked for."""
    person, value = rng.choice(PEOPLE), code(rng, held_out)
    told, ask = f"The code of {person} is {value}.", rng.choice(PHRASINGS["recall"]).format(person)
    if turns:
        messages = [_user(f"Remember this. {told}"), {"role": "assistant", "content": "I will remember it."}, *turns, _user(ask)]
    else:
        messages = [_user(" ".join([told, *rng.sample(FILLER, rng.randrange(0, 9)), ask]))]
    return Question("recall", tuple(messages), f"The code of {person} is {value}.", f"recall {value}")


def code(rng: random.Random, held_out: bool) -> int:
    while True:
        value = rng.randrange(100, 10_000)
        if is_held_out(f"recall {value}", HELD_OUT_PERCENT["recall"]) == held_out:
            return value


def question(kind: str, rng: random.Random, held_out: bool) -> Question:
    """One question of `kind`, from the training side or from the held-out side."""
    if kind == "recall":
        turns = []
        if rng.random() < 0.4:
            for _ in range(rng.randrange(0, 4)):
                q = question(rng.choice(["capital", "symbol", "sum", "trivia", "translation"]), rng, False)
                turns += [*q.messages, {"role": "assistant", "content": q.answer}]
        return recall(rng, held_out, turns)
    while True:
        text, answer, key = fact(kind, rng)
        if is_held_out(key, HELD_OUT_PERCENT[kind]) == held_out:
            return Question(kind, (_user(text),), answer, key)


def thinking(rng: random.Random) -> tuple[list[dict], str]:
    """A sum worked out in the thought channel; the answer text carries the channel's markers."""
    q = question("sum", rng, False)
    a, _, b = q.answer.split(" = ")[0].split(" ")
    a, b = int(a), int(b)
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    thought = f"{a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10} = {tens}, so {10 * tens} + {ones} = {a + b}"
    return list(q.messages), f"<|channel>thought\n{thought}\n<channel|>{q.answer}"


def weather(rng: random.Random) -> list[dict]:
    """A whole exchange with a tool: question, call, result, answer."""
    city, sky, degrees = rng.choice(list(CAPITALS.values())), rng.choice(WEATHER), rng.randrange(0, 40)
    ask = rng.choice(["What is the weather in {0}?", "How is the weather in {0}?", "Tell me the weather in {0}."])
    return [_user(ask.format(city)),
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {
                "name": "get_weather", "arguments": {"city": city}}}]},
            {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": {"sky": sky, "degrees": degrees}},
            {"role": "assistant", "content": f"In {city} it is {sky} with {degrees} degrees."}]


WEIGHTS = {"sum": 15, "product": 11, "count": 28, "recall": 18, "capital": 8, "symbol": 7, "translation": 8, "trivia": 5}


def training_questions(rng: random.Random) -> Iterator[Question]:
    """An endless stream of training questions, kinds drawn by `WEIGHTS`."""
    while True:
        yield question(rng.choices(KINDS, [WEIGHTS[k] for k in KINDS])[0], rng, held_out=False)


def held_out_questions(seed: int, per_kind: int) -> list[Question]:
    """`per_kind` distinct held-out questions of every kind."""
    rng, found = random.Random(seed), []
    for kind in KINDS:
        seen: dict[tuple, Question] = {}
        for _ in range(200 * per_kind):
            q = question(kind, rng, held_out=True)
            seen.setdefault((q.messages[-1]["content"], q.answer), q)
            if len(seen) == per_kind:
                break
        found += seen.values()
    return found
