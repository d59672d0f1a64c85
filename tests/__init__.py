"""The tests, one folder a component; `fundamentals/` reads as the tutorial, `rules/` states the ten rules of the queue."""
