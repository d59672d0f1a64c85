-- release: an attempt gives its job back.
-- Guarantee: only the holder of the current token releases; the job is runnable again at its old age in the same call.
-- Keys: root. Arguments: id, token, how: 'returned' (uncounted: shutdown, not started), 'lost' (counted: its process went down with
--   the machinery around it), 'unfit' (uncounted; this worker's class is no longer offered the signature).
-- Returns: {'ok', state}, {'already'} or {'stale'}.
register('release', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  if A[3] ~= 'returned' and A[3] ~= 'lost' and A[3] ~= 'unfit' then return H.refuse('release', A[3]) end
  local j = H.load(P, A[1])
  if not H.holds(j, A[2]) then return {j and A[2] ~= '' and j.ended_token == A[2] and 'already' or 'stale'} end
  j.reported = true
  local worker = j.worker
  local state
  if A[3] == 'unfit' then
    local class = redis.call('HGET', P .. 'worker:' .. worker, 'class')
    if class then
      redis.call('HDEL', P .. 'fits:' .. class, j.sig)
      redis.call('SREM', P .. 'classes:' .. j.sig, class)
    end
  end
  if A[3] == 'lost' then
    state = H.lost(P, j, now)
  else
    state = H.end_or(P, j, now, function() H.again(P, j, 'ready', now); return 'queued' end)
  end
  H.poke(P, worker, now)
  return {'ok', state}
end)
