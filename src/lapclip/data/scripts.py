"""Which writing systems and languages captions are in; a guess from the letters and the commonest words alone."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

NONE = "none"  # a caption without letters
UNKNOWN = "unknown"
NAMES = {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana", "KATAKANA-HIRAGANA": "Kana"}
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u27bf\u2b50\u2b55]")
WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")

# What a caption can hardly do without, and what captions are often about. A word may stand in several languages.
WORDS = {
    "English": """a an the of in on at with and is are to by for from his her its their two three this that while man
        woman men women people boy girl child children dog dogs cat person group red blue green black white yellow
        standing sitting holding wearing playing running walking photo small large over through near next""",
    "German": """ein eine einen einem einer der die das den dem des und mit auf im am vor ist sind zwei drei von zu für
        über neben mann frau männer frauen kind kinder hund katze leute junge mädchen rot rote blaue grüne schwarze
        weiße gelbe steht sitzt hält trägt spielt läuft foto klein kleine groß große""",
    "French": """un une le la les des du de et dans sur avec est sont deux trois à au aux en par pour qui homme femme
        hommes femmes enfant enfants chien chat gens garçon fille rouge bleu bleue vert verte noir noire blanc blanche
        jaune debout assis tient porte joue court photo petit petite grand grande près""",
    "Spanish": """un una unos unas el la los las de del y en con es son está están dos tres por para que su sus hombre
        mujer hombres mujeres niño niña niños perro gato gente chico chica rojo roja azul verde negro negra blanco
        blanca amarillo pie sentado juega corre foto pequeño pequeña grande sobre junto""",
    "Portuguese": """um uma uns umas o os as da do das dos de e em no na nos nas com é são está estão dois duas três por
        para que seu sua homem mulher homens mulheres menino menina crianças cachorro cão gato pessoas vermelho azul
        verde preto preta branco branca amarelo sentado joga corre foto pequeno pequena grande sobre""",
    "Italian": """un una uno il lo la i gli le di del della dei e in con su sul sulla nel nella è sono due tre per che
        uomo donna uomini donne bambino bambina bambini cane gatto persone ragazzo ragazza rosso rossa blu verde nero
        nera bianco bianca giallo piedi seduto gioca corre foto piccolo piccola grande""",
    "Dutch": """een het de van in op met en is zijn aan bij voor door naast twee drie die dat naar man vrouw mannen
        vrouwen kind kinderen hond kat mensen jongen meisje rood rode blauw blauwe groene zwarte witte gele staat zit
        houdt draagt speelt rent foto klein kleine groot grote over""",
    "Turkish": """bir ve ile bu iki üç için olan üzerinde önünde içinde yanında adam kadın erkek çocuk çocuklar köpek
        kedi insanlar kız kırmızı mavi yeşil siyah beyaz sarı duran oturan tutan giyen oynayan koşan fotoğraf küçük
        büyük var""",  # noqa: RUF001
    "Indonesian": """seorang seekor sebuah yang di dan dengan dari pada ke untuk ini itu dua tiga sedang adalah pria
        wanita anak orang anjing kucing laki perempuan merah biru hijau hitam putih kuning berdiri duduk memegang
        memakai bermain berlari foto kecil besar atas depan""",
    "Polish": """i w na z ze się jest są do od dla przez obok dwa dwie dwóch trzy mężczyzna kobieta ludzie dziecko
        dzieci pies kot chłopiec dziewczyna dziewczynka czerwony czerwona niebieski zielony czarny biały żółty stoi
        siedzi trzyma nosi gra biegnie zdjęcie mały duży""",
}
WORDS_OF = {language: frozenset(words.split()) for language, words in WORDS.items()}


def scripts_of(captions: Iterable[str]) -> Counter[str]:
    """How many captions are mostly written in each script."""
    return Counter(map(script_of, captions))


def script_of(caption: str) -> str:
    """The script of most letters; "Emoji" or "none" where there are no letters."""
    if caption.isascii():
        return "Latin" if any(map(str.isalpha, caption)) else NONE
    scripts = Counter(map(script_of_letter, filter(str.isalpha, caption)))
    if scripts:
        return max(sorted(scripts), key=scripts.__getitem__)
    return "Emoji" if EMOJI.search(caption) else NONE


@lru_cache(maxsize=100_000)
def script_of_letter(letter: str) -> str:
    """By its Unicode name; a letter in a circle or of full width counts as the plain one."""
    plain = unicodedata.normalize("NFKD", letter)[0]
    first = unicodedata.name(plain, "OTHER").split()[0]
    return NAMES.get(first, first.capitalize())


def share_outside_a_to_z(captions: Iterable[str]) -> float:
    """The share of letters, whatever their case, that an English keyboard does not have."""
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(caption.lower())
    letters = {letter: count for letter, count in counts.items() if letter.isalpha()}
    outside = sum(count for letter, count in letters.items() if not letter.isascii())
    return outside / max(sum(letters.values()), 1)


def languages_of(captions: Iterable[str]) -> dict[str, float]:
    """The share of captions in Latin letters that are in each language, "unknown" where their words do not tell."""
    counts = Counter(language_of(caption) for caption in captions if script_of(caption) == "Latin")
    return {language: count / counts.total() for language, count in counts.most_common()}


def language_of(caption: str) -> str:
    """The language that clearly most of the caption's words belong to."""
    said = set(WORD.findall(caption.lower()))
    second, first = sorted((len(said & words), language) for language, words in WORDS_OF.items())[-2:]
    return first[1] if first[0] > second[0] else UNKNOWN
