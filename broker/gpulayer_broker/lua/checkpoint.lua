-- checkpoint: the attempt has stored a checkpoint; it belongs to the job and outlives the attempt.
-- Guarantee: only the current attempt's checkpoint is taken; a range of an array keeps none.
-- Keys: root. Arguments: id, token, manifest digest.
-- Returns: {'ok'} or {'stale'}.
register('checkpoint', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  local j = H.load(P, A[1])
  if not H.holds(j, A[2]) then return {'stale'} end
  if j.parent ~= '' then return H.refuse('checkpoint', 'a range of an array keeps none') end
  redis.call('HSET', H.job(P, A[1]), 'checkpoint', A[3], 'checkpoint_ms', now)
  return {'ok'}
end)
