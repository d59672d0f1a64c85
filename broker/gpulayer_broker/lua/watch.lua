-- watch: a client waits for jobs that it did not submit, or whose notices it may have missed.
-- Guarantee: a job that is final is answered at once; each other one will appear on `done:<client>` exactly when it ends.
-- Keys: root. Arguments: client, id, id, …
-- Returns: {id, state, id, state, …} of those that are final, state 'missing' for those that do not exist.
register('watch', {}, function(K, A)
  local P, out = K[1], {}
  for i = 2, #A do
    local state, parent = unpack(redis.call('HMGET', H.job(P, A[i]), 'state', 'parent'))
    if not state or parent or H.FINAL[state] then
      out[#out + 1] = A[i]
      out[#out + 1] = not parent and state or 'missing'
    else
      redis.call('SADD', P .. 'watchers:' .. A[i], A[1])
    end
  end
  return out
end)
