-- log: output of a rank, appended to its live tail.
-- Guarantee: only the current attempt's output is taken; a repeated call changes nothing; the tail stays below its bound (1 MiB). An
--   entry's id is the byte offset behind it, so tail and whole log share one offset space; 't' is when it came.
-- Keys: root. Arguments: id, token, rank, stream ('out' or 'err'), offset, bytes.
-- Returns: {'ok'}, {'already'} or {'stale'}.
register('log', {}, function(K, A)
  local P, now = K[1], H.now()
  local j = H.load(P, A[1])
  if not H.holds(j, A[2]) then return {'stale'} end
  if j.state == 'scheduled' then H.started(P, j, now) end
  local top = tonumber(A[5]) + #A[6]
  local key = P .. 'log:' .. j.id .. ':' .. j.attempt .. ':' .. A[3]
  local r = redis.pcall('XADD', key, string.format('%d-0', top), 's', A[4], 'd', A[6], 't', now)
  if type(r) == 'table' and r.err then
    if string.find(r.err, 'equal or smaller', 1, true) then return {'already'} end
    return r
  end
  local tail = H.config(P, 'log_tail', 1048576)
  if top > tail then redis.call('XTRIM', key, 'MINID', string.format('%d-0', top - tail)) end
  return {'ok'}
end)
