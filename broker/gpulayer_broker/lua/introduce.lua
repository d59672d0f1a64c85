-- introduce: makes a signature known, with the classes that satisfy it.
-- Guarantee: accepted only if it was matched against every class known at this moment; at most 1,024 live signatures, for
--   which the one that was idle longest makes room.
-- Keys: root. Arguments: signature, canonical requirements, version, n, then n times class, groups.
-- Returns: {'ok'}, {'match', version}, or {'too_many', limit}.
register('introduce', {}, function(K, A)
  local P, sig, now = K[1], A[1], H.now()
  if not H.amounts(sig) then return H.refuse('signature', sig) end
  if H.known(P, sig) then return {'ok'} end
  local version = redis.call('GET', P .. 'classes_version') or '0'
  if A[3] ~= version then return {'match', version} end
  if redis.call('HLEN', P .. 'signatures') >= H.MAX_SIGNATURES and H.retire_idle(P, '+inf', 1) == 0 then
    return {'too_many', H.MAX_SIGNATURES}
  end
  redis.call('HSET', P .. 'signatures', sig, A[2])
  redis.call('ZADD', P .. 'idlesigs', now, sig)
  redis.call('INCR', P .. 'signatures_version')
  for i = 5, 4 + 2 * tonumber(A[4]), 2 do
    redis.call('SADD', P .. 'classes:' .. sig, A[i])
    redis.call('HSET', P .. 'fits:' .. A[i], sig, A[i + 1])
  end
  return {'ok'}
end)
