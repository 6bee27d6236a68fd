"""The nouns of oomdoctor: frozen values that the rooms hand to one another, and the live ``Session``."""
