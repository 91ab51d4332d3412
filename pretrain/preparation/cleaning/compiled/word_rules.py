"""What English words are: classes of characters and the words that are divided, or kept whole, against the rules.

The division is spaCy's for English, which the published filters count words by: at spaces, then signs off both ends of
a word, then within it. Data only; words.py applies it.
"""

import itertools
import sys
import unicodedata

import numpy as np

from pretrain.preparation.cleaning.compiled.kept import kept_array

IS_SPACE, ALPHABETIC, LOWER, UPPER, DIGIT, PREFIX, SUFFIX, QUOTE = (1 << bit for bit in range(8))
SIGN, ICON, PUNCTUATION, TERMINAL, CURRENCY, SENTENCE_END, PUNCTUATION_CATEGORY, LINE_END = (
    1 << n for n in range(8, 16)
)

_SIGNS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
_CURRENCIES = "$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿"
# Unicode's Sentence_Terminal.
_TERMINAL = """21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736
17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f
203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f
a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59
10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239
1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946
11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44
16e98 1bc9f 1da88"""
# Ends of sentences of later versions of Unicode, which do not end one for C4's count.
_ENDS_NO_SENTENCE = (
    "61d-61e 837 839 83d-83e 17d4-17d6 17d9-17da 1b7d-1b7e 2e53-2e54 10f55-10f59 10f86-10f89 11944 11946 "
    "11ef7-11ef8 11f43-11f44 16e98"
)
# Beside those that end sentences: the signs that CCNet leaves out when it compares texts, and control characters.
_PUNCTUATION = """0-8 b-1f 22-2d 2f 3a-3e 40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001
3008-300d 3010-3011 ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e"""
# Scripts without case, whose letters count as both; of some the marks, too.
_UNCASED_SCRIPTS = "580-6ff 880-9ff b80-cff d80-dff 1100-137f 3000-30ff 3400-9fff ac00-d77f f900-feff 20000-2ebff"
_UNCASED = "591-5f4 640-64a 670-6d3 6fa-6fc 900-9ff b80-c7f"

_EMOTICONS = r""":) :)) :))) :( :(( :((( :-) :-)) :-))) :-( :-(( :-((( (: (; (= (-: (-; (-8 (o: )-: ): :* :-* :-/
:-0 :-3 :-> :-D :-O :-P :-X :-] :-o :-p :-x :-| :-} :/ :0 :1 :3 :> :D :O :P :X :] :o :o) :p :x :|
:} :() :'( :') :'-( :'-) :’( :’) :’-( :’-) ;) ;-) ;-D ;D ;_; =( =) =/ =3 =D =[ =] =| [-: [: [= ]=
<3 <33 <333 </3 >:( >:o >.< >.> <.< ><(((*> 8) 8-) 8-D 8D XD XDD xD xDD ^_^ ^__^ ^___^ -_- -__-
@_@ (*_*) (-_-) (._.) (>_<) (^_^) (¬_¬) (ಠ_ಠ) ಠ_ಠ O.O O.o O_O O_o o.O o.o o_O o_o o.0 o_0 0.0 0.o
0_0 0_o V.V V_V v.v v_v ._. C++ \") ¯\(ツ)/¯"""
EMOTICONS = _EMOTICONS.split()
_WHOLE_WORDS = """Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g.
Feb. Fla. Ga. Gen. Gov. I.E. I.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La.
Ltd. Mar. Mass. Md. Messrs. Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M.
N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa. Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn.
Va. Wash. Wis. a.m. p.m. co. e.g. i.e. v.s. vs. ä. ö. ü. and/or w/o ' '' 'S 's 'd 'em 'll 're
'bout 'cause 'cos 'coz 'cuz 'nuff 'Cause 'Cos 'Coz 'Cuz ma'am Ma'am o'clock O'clock ol' Ol'"""
_WHOLE = _WHOLE_WORDS.split() + [f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz"]
_G_DROPPED = ("doin", "goin", "havin", "lovin", "nothin", "nuthin", "somethin")
_SUBJECTS = {
    "'d 'd've 'll 'll've": "he how i it she that there these they this those we what when where who why you",
    "'s": "he how it let she that there this what when where who why",
    "'re": "how there these they those we what when where who why you",
    "'ve": "could how i might must should there these they those we what when where who why would you",
}
"""{endings: words}; not all of them without the apostrophe."""
_SPELLED_LIKE_WORDS = {"he'll", "i'll", "it's", "let's", "she'd", "she'll", "we'll", "we're", "who're"}
_NEGATED = "could dare did do does had has have is may might must need ought sha should was were wo would ai are ca"
_NEGATED_HAVE = "ca could did do does had may might must need ought sha should wo would"


def _divided() -> dict[str, list[str]]:
    """{word: its pieces} in lower case, with straight apostrophes."""
    found = {"i'm": ["i", "'m"], "i'ma": ["i", "'m", "a"], "im": ["i", "m"], "ima": ["i", "m", "a"]}
    found |= {"cannot": ["can", "not"], "gonna": ["gon", "na"], "gotta": ["got", "ta"]}
    found |= {"c'mon": ["c'm", "on"], "how'd'y": ["how", "'d", "'y"]}
    found |= {"not've": ["not", "'ve"], "notve": ["not", "ve"]}
    for endings, words in _SUBJECTS.items():
        for word, ending in itertools.product(words.split(), endings.split()):
            pieces = [word, *(f"'{piece}" for piece in ending.split("'")[1:])]
            found["".join(pieces)] = pieces
            if "".join(pieces) not in _SPELLED_LIKE_WORDS:
                found["".join(pieces).replace("'", "")] = [piece.replace("'", "") for piece in pieces]
    for word in _NEGATED.split():
        forms = [["n't"]] + [["n't", "'ve"]] * (word in _NEGATED_HAVE.split())
        for pieces in ([word, *form] for form in forms):
            found["".join(pieces)] = pieces
            found["".join(pieces).replace("'", "")] = [piece.replace("'", "") for piece in pieces]
    return found


def special_words() -> dict[str, list[str]]:
    """{word: its pieces} of the words that the rules do not divide rightly, in each of their spellings."""
    words = {word: [word] for word in [*_WHOLE, *EMOTICONS]}
    for pieces in _divided().values():
        for cased in (pieces, [pieces[0].capitalize(), *pieces[1:]]):
            words["".join(cased)] = cased
    for word in _G_DROPPED:
        words |= {form + end: [form + end] for form in (word, word.capitalize()) for end in ("", "'")}
    words |= {"y'all": ["y'", "all"], "yall": ["y", "all"]} | {
        word: [word] for word in ("ll", "em", "nuff", "ol", "Ol")
    }
    for hour, half in itertools.product(range(1, 13), ("am", "pm", "a.m.", "p.m.")):
        words[f"{hour}{half}"] = [str(hour), half]
    curled = {word.replace("'", "’"): [piece.replace("'", "’") for piece in pieces] for word, pieces in words.items()}
    return curled | words


JOINED = sorted({*EMOTICONS, *_WHOLE, *(word.replace("'", "’") for word in _WHOLE)})
"""Whole even where the rules divided them as parts of something longer."""
_UNITS = """km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h
kmh mph hPa Pa mbar mb MB kb KB gb GB tb TB T G M K %"""
UNITS_OF_MEASURE = _UNITS.split()
"""That are divided from a digit before them."""


def ranges_of(text: str) -> list[int]:
    """'21 61d-61f' -> [0x21, 0x61d, 0x61e, 0x61f]"""
    ends = [[int(end, 16) for end in part.split("-")] for part in text.split()]
    return [code for part in ends for code in range(part[0], part[-1] + 1)]


@kept_array
def character_classes() -> np.ndarray:
    """(0x110000,) uint32: the classes of every code point."""
    classes = np.zeros(sys.maxunicode + 1, np.uint32)
    by_category = {"Ll": LOWER, "Lu": UPPER, "So": ICON | PREFIX | SUFFIX}
    uncased = set(ranges_of(_UNCASED_SCRIPTS))
    # Beyond these planes nothing has a class.
    for code in range(0x32000):
        character = chr(code)
        category = unicodedata.category(character)
        flags = by_category.get(category, 0)
        if category == "Lo" and code in uncased:
            flags = LOWER | UPPER
        if character.isalpha():
            flags |= ALPHABETIC
        if character.isspace():
            flags |= IS_SPACE
        if category[0] == "P":
            flags |= PUNCTUATION_CATEGORY
        classes[code] = flags
    for codes, flags in (
        (ranges_of(_UNCASED), LOWER | UPPER),
        (range(0x30, 0x3A), DIGIT),
        (map(ord, _SIGNS), SIGN | PREFIX | SUFFIX),
        (map(ord, _QUOTES), QUOTE | PREFIX | SUFFIX),
        (map(ord, _CURRENCIES), CURRENCY | PREFIX),
        (map(ord, "§%="), PREFIX),
        (map(ord, "—–"), PREFIX | SUFFIX),
        (ranges_of(_TERMINAL), TERMINAL | PUNCTUATION | SENTENCE_END),
        (ranges_of(_PUNCTUATION), PUNCTUATION),
        ((0xA, 0xB, 0xC, 0xD, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029), LINE_END),
    ):
        classes[list(codes)] |= flags
    classes[ranges_of(_ENDS_NO_SENTENCE)] &= ~np.uint32(SENTENCE_END)
    return classes
