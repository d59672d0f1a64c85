-- match: a page of the other side's table, for whoever is new (PEP 440 ranges and labels cannot be judged in Lua).
-- Keys: root. Arguments: 'signatures' or 'classes', cursor.
-- Returns: {version, next cursor, name, canonical, name, canonical, …}; the version is what `register` or `introduce` repeats.
register('match', {'no-writes'}, function(K, A)
  local side = A[1] == 'classes' and 'classcaps' or 'signatures'
  local page = redis.call('HSCAN', K[1] .. side, A[2], 'COUNT', 256)
  local out = {redis.call('GET', K[1] .. A[1] .. '_version') or '0', page[1]}
  for i = 1, #page[2] do out[#out + 1] = page[2][i] end
  return out
end)
