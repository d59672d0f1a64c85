-- Lua 5.1 as the server runs it: files are blocks of one library, which share `H` and `register`.
std = "lua51"
read_globals = {"redis", "register"}
globals = {"H"}
max_line_length = 140
