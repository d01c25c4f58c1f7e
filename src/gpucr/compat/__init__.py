"""Commands that take the place of other vendors' commands. Imports nothing: start-up time counts here."""
