"""Drop-in replacements for other vendors' commands. Imports nothing: start-up time counts here."""
