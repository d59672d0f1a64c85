-- tick: what falls due: delayed jobs become runnable, leases that ran out are reaped, unanswered rings go to another worker,
--   what is past its retention leaves, a job that small ones keep from its turn has a machine kept for it (h_earmarks.lua).
-- Guarantee: at most 100 of each a call; after an outage (no tick for a while, or a clock that jumped) every lease is first given
--   its full length once, so an outage alone loses no job.
-- How long a lease, a record and a result last is the namespace's own affair (`config`), whoever calls.
-- Keys: root. Arguments: none, or, to remove more now than the namespace would, retention_ms of records, and of results.
-- Returns: {ms until the next due, reaped, rung, purged records, dropped results}; a clock that stands still for half a
--   lease looks like an outage, so the next tick is due within a third of one.
local BATCH = 100

local function promote(P, now)
  local due = redis.call('ZRANGEBYSCORE', P .. 'delayed', '-inf', now, 'LIMIT', 0, BATCH)
  for _, id in ipairs(due) do
    redis.call('ZREM', P .. 'delayed', id)
    if redis.call('HGET', H.job(P, id), 'state') == 'queued' then
      H.enter(P, id, now)
      H.event(P, id, 'queued')
    end
  end
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
    elseif j.cancel == '' and redis.call('HGET', H.job(P, id), 'on_outage') == 'keep' then
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

local function ring_again(P, now)
  local late = redis.call('ZRANGEBYSCORE', P .. 'rung', '-inf', now, 'LIMIT', 0, BATCH)
  for _, w in ipairs(late) do
    local sig = H.unring(P, w)
    if not sig then redis.call('ZREM', P .. 'rung', w) end
    H.hand_on(P, w, sig, now)
  end
  return #late
end

-- results past their retention, from the last one that was dropped on: at its place among the finished jobs, or, where that job
-- has left, from its time on
local function fade(P, now, keep)
  local final, mark, last = P .. 'jobs:final', unpack(redis.call('HMGET', P .. 'clock', 'results_ms', 'results_job'))
  local at = last and redis.call('ZRANK', final, last)
  local some = at and redis.call('ZRANGE', final, at + 1, at + BATCH, 'WITHSCORES')
    or redis.call('ZRANGEBYSCORE', final, mark or '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, BATCH)
  local n = 0
  for i = 1, #some, 2 do
    if tonumber(some[i + 1]) > now - keep then break end
    H.fade(P, some[i])
    last, mark, n = some[i], some[i + 1], n + 1
  end
  if n > 0 then redis.call('HSET', P .. 'clock', 'results_ms', mark, 'results_job', last) end
  return n
end

-- who was silent because nobody was there gets time for a heartbeat first
local function forget_silent(P, now)
  for _, w in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', now - H.DAY_MS, 'LIMIT', 0, BATCH)) do
    if redis.call('EXISTS', P .. 'running:' .. w) == 0 then H.forget_worker(P, w) end
  end
  for _, class in ipairs(redis.call('ZRANGEBYSCORE', P .. 'classseen', '-inf', now - 2 * H.DAY_MS, 'LIMIT', 0, 16)) do
    H.retire_class(P, class)
  end
end

-- how many records left, how many results, and whether a batch was full, so that more may be due
local function purge(P, now, keep, keep_results)
  local old, gone, dropped = redis.call('ZRANGEBYSCORE', P .. 'jobs:final', '-inf', now - keep, 'LIMIT', 0, BATCH), 0, 0
  for _, id in ipairs(old) do
    if H.leave(P, id) then gone = gone + 1 end
  end
  local expired = redis.call('ZRANGEBYSCORE', P .. 'expiring', '-inf', now, 'LIMIT', 0, BATCH)
  for _, id in ipairs(expired) do
    if H.expired(P, id) then gone = gone + 1 else dropped = dropped + 1 end
  end
  local faded = fade(P, now, keep_results)
  return gone, dropped + faded, #old == BATCH or #expired == BATCH or faded == BATCH
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

-- the namespace's own times: of a lease, of records and of results
local function times(P)
  local v = redis.call('HMGET', P .. 'config', 'lease_ms', 'job_keep_ms', 'result_keep_ms')
  return tonumber(v[1] or '60000'), tonumber(v[2] or '2592000000'), tonumber(v[3] or '604800000')
end

register('tick', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  local lease, keep, keep_results = times(P)
  promote(P, now)
  H.release_more(P, now)
  local out = outage(P, lease, now)
  local reaped = out and 0 or reap(P, lease, now)
  local rung = ring_again(P, now)
  local purged, faded, more = purge(P, now, tonumber(A[1] or keep), tonumber(A[2] or keep_results))
  if H.retire_idle(P, now - H.DAY_MS, BATCH) == BATCH then more = true end
  if not out then forget_silent(P, now) end
  local look = not out and H.look_at_earmarks(P, now) or lease
  return {more and 0 or math.min(next_due(P, now), math.floor(lease / 3), look), reaped, rung, purged, faded}
end)
