-- checkpoint: the attempt has stored a checkpoint; it belongs to the job and outlives the attempt.
-- Guarantee: only the current attempt's checkpoint is taken.
-- Keys: root. Arguments: id, token, manifest digest.
-- Returns: {'ok'} or {'stale'}.
register('checkpoint', {'allow-oom'}, function(K, A)
  local P = K[1]
  if not H.holds(H.load(P, A[1]), A[2]) then return {'stale'} end
  redis.call('HSET', H.job(P, A[1]), 'checkpoint', A[3], 'checkpoint_ms', H.now())
  return {'ok'}
end)
