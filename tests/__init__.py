"""The tests, a folder for each component; `rules/` states the ten rules, `fundamentals/` reads as the tutorial."""
