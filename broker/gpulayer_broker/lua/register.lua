-- register: a worker, or its next incarnation, joins the namespace with its class of capabilities.
-- Guarantee: a class is accepted only if it was matched against every signature known at this moment; what a former
--   incarnation of the same worker held counts as lost and is free again at once. A drain lasts as long as its incarnation.
-- Keys: root. Arguments: worker, node, incarnation, class, slots, node_cpus, memory_mib, heartbeat_ms, grace_ms, info,
--   capabilities, version, n, then n times signature, groups.
-- Returns: {'match', version} to match first (see `match`), or {'ok', version}.
register('register', {'allow-oom'}, function(K, A)
  local P, w, now = K[1], A[1], H.now()
  local class, key = A[4], P .. 'worker:' .. A[1]
  if redis.call('HEXISTS', P .. 'classcaps', class) == 0 then
    local version = redis.call('GET', P .. 'signatures_version') or '0'
    if A[12] ~= version then return {'match', version} end
    redis.call('HSET', P .. 'classcaps', class, A[11])
    redis.call('INCR', P .. 'classes_version')
    for i = 14, 13 + 2 * tonumber(A[13]), 2 do
      redis.call('HSET', P .. 'fits:' .. class, A[i], A[i + 1])
      redis.call('SADD', P .. 'classes:' .. A[i], class)
    end
  end
  redis.call('ZADD', P .. 'classseen', now, class)
  local before = redis.call('HMGET', key, 'incarnation', 'class', 'node', 'state')
  if before[1] and before[1] ~= A[3] then
    local lost = {}
    for _, id in ipairs(redis.call('SMEMBERS', P .. 'running:' .. w)) do
      local j = H.load(P, id)
      if j and H.holds(j, j.token) then
        lost[#lost + 1] = id
        H.lost(P, j, now)
      else
        redis.call('SREM', P .. 'running:' .. w, id)
      end
    end
    H.count_death(P, w, lost, now)
    redis.call('DEL', P .. 'inbox:' .. w)
  end
  if before[2] then H.idle_remove(P, before[2], w) end
  H.lift_of(P, w, before[3], now)
  if before[3] and before[3] ~= A[2] then redis.call('SREM', P .. 'siblings:' .. before[3], w) end
  local state = before[1] == A[3] and before[4] == 'draining' and 'draining' or 'online'
  redis.call('HSET', key, 'node', A[2], 'incarnation', A[3], 'class', class, 'slots', A[5], 'cpus', A[6], 'memory', A[7],
             'heartbeat_ms', A[8], 'grace_ms', A[9], 'info', A[10], 'state', state, 'since_ms', now)
  if before[1] ~= A[3] then redis.call('HSET', key, 'nonce', '', 'grants', '') end
  redis.call('SADD', P .. 'siblings:' .. A[2], w)
  redis.call('ZADD', P .. 'workers', now, w)
  return {'ok', redis.call('GET', P .. 'classes_version') or '0'}
end)
