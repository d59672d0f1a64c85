-- tick: what falls due: delayed jobs become runnable, leases that ran out are reaped, unanswered rings go to another worker,
--   what is past its retention leaves.
-- Guarantee: at most 100 of each a call; after an outage (no tick for a while, or a clock that jumped) every lease is first given
--   its full length once, so an outage alone loses no job.
-- Keys: root. Arguments: lease_ms, retention_ms (records), result_retention_ms.
-- Returns: {ms until the next due, promoted, reaped, rung, purged}.
local BATCH = 100

local function promote(P, now)
  local due = redis.call('ZRANGEBYSCORE', P .. 'delayed', '-inf', now, 'LIMIT', 0, BATCH)
  for _, id in ipairs(due) do
    redis.call('ZREM', P .. 'delayed', id)
    if redis.call('HGET', H.job(P, id), 'state') == 'queued' then
      H.enter(P, id, now)
      H.event(P, id, 'queued', now)
    end
  end
  return #due
end

-- nobody ticked for more than half a lease, or the clock went back: leases are not judged before a full lease has passed
local function outage(P, lease, now)
  local last, floor = unpack(redis.call('HMGET', P .. 'clock', 'last_ms', 'floor_ms'))
  redis.call('HSET', P .. 'clock', 'last_ms', now)
  last, floor = tonumber(last or now), tonumber(floor or '0')
  if now - last > lease / 2 or now < last or floor > now + lease then
    floor = now + lease
    redis.call('HSET', P .. 'clock', 'floor_ms', floor)
  end
  return now < floor
end

local function reap(P, lease, now)
  local due, dead, n = redis.call('ZRANGEBYSCORE', P .. 'leases', '-inf', now, 'LIMIT', 0, BATCH), {}, 0
  for _, id in ipairs(due) do
    local j = H.load(P, id)
    if not H.holds(j, j and j.token or '') then
      redis.call('ZREM', P .. 'leases', id)
    elseif j.on_outage == 'keep' and j.cancel == '' then
      redis.call('ZADD', P .. 'leases', now + lease, id)
    else
      local lost = dead[j.worker] or {}
      lost[#lost + 1], dead[j.worker] = id, lost
      H.lost(P, j, now)
      n = n + 1
    end
  end
  for w, lost in pairs(dead) do
    H.count_death(P, w, lost, now)
    H.poke(P, w, now)                            -- it may live, and have room again
  end
  return n
end

-- dependents that one call could not release
local function release(P, now)
  for _, id in ipairs(redis.call('SRANDMEMBER', P .. 'releasing', 4)) do
    H.release_dependents(P, id, redis.call('HGET', H.job(P, id), 'state') or 'failed', now)
  end
end

local function ring_again(P, now)
  local late = redis.call('ZRANGEBYSCORE', P .. 'rung', '-inf', now, 'LIMIT', 0, BATCH)
  for _, w in ipairs(late) do
    redis.call('ZREM', P .. 'rung', w)
    local sig = redis.call('HGET', P .. 'rungsig', w)
    redis.call('HDEL', P .. 'rungsig', w)
    H.hand_on(P, w, sig, now)
  end
  return #late
end

local function purge(P, now, retention, results, out)
  local old = redis.call('ZRANGEBYSCORE', P .. 'jobs:final', '-inf', now - retention, 'LIMIT', 0, BATCH)
  for _, id in ipairs(old) do H.purge(P, id) end
  local expired = redis.call('ZRANGEBYSCORE', P .. 'expiring', '-inf', now, 'LIMIT', 0, BATCH)
  for _, id in ipairs(expired) do H.expired(P, id) end
  local mark = redis.call('HGET', P .. 'clock', 'results_ms') or '0'
  local faded = redis.call('ZRANGEBYSCORE', P .. 'jobs:final', '(' .. mark, now - results, 'WITHSCORES', 'LIMIT', 0, BATCH)
  for i = 1, #faded, 2 do
    H.fade(P, faded[i])
    mark = faded[i + 1]
  end
  if #faded > 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'jobs:final', mark, mark)) do H.fade(P, id) end
    redis.call('HSET', P .. 'clock', 'results_ms', mark)
  end
  H.retire_idle(P, now - H.DAY_MS, BATCH)
  if out then return #old + #expired end         -- who was silent because nobody was there gets time for a heartbeat first
  for _, w in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', now - H.DAY_MS, 'LIMIT', 0, BATCH)) do
    if redis.call('EXISTS', P .. 'running:' .. w) == 0 then H.forget_worker(P, w) end
  end
  for _, class in ipairs(redis.call('ZRANGEBYSCORE', P .. 'classseen', '-inf', now - 2 * H.DAY_MS, 'LIMIT', 0, 16)) do
    H.retire_class(P, class)
  end
  return #old + #expired
end

-- after an outage no lease is looked at before its floor: who keeps the clock sleeps until then
local function next_due(P, now)
  local due, floor = now + 3600000, tonumber(redis.call('HGET', P .. 'clock', 'floor_ms') or '0')
  if redis.call('EXISTS', P .. 'releasing') == 1 then return 0 end
  for _, name in ipairs({'delayed', 'leases', 'rung'}) do
    local first = redis.call('ZRANGE', P .. name, 0, 0, 'WITHSCORES')
    if first[2] then due = math.min(due, math.max(tonumber(first[2]), name == 'leases' and floor or 0)) end
  end
  return math.max(0, due - now)
end

register('tick', {'allow-oom'}, function(K, A)
  local P, now, lease = K[1], H.now(), tonumber(A[1])
  local promoted = promote(P, now)
  release(P, now)
  local out = outage(P, lease, now)
  local reaped = out and 0 or reap(P, lease, now)
  local rung = ring_again(P, now)
  local purged = purge(P, now, tonumber(A[2]), tonumber(A[3]), out)
  return {purged < BATCH and next_due(P, now) or 0, promoted, reaped, rung, purged}
end)
