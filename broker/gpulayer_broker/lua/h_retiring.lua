-- Shared: what leaves the tables. Signatures without a job that is not final, classes without a worker, workers that have
-- been silent for a day, finished jobs past their retention.

H.MAX_SIGNATURES = 1024
H.DAY_MS = 86400000

local function retire_signature(P, sig)
  for _, class in ipairs(redis.call('SMEMBERS', P .. 'classes:' .. sig)) do redis.call('HDEL', P .. 'fits:' .. class, sig) end
  redis.call('DEL', P .. 'classes:' .. sig)
  redis.call('HDEL', P .. 'signatures', sig)
  redis.call('ZREM', P .. 'idlesigs', sig)
  redis.call('INCR', P .. 'signatures_version')  -- who judged it meanwhile must not write it down again
end

-- retires up to `most` signatures without an open job, of which the last ended before `until_ms`
function H.retire_idle(P, until_ms, most)
  local idle = redis.call('ZRANGEBYSCORE', P .. 'idlesigs', '-inf', until_ms, 'LIMIT', 0, most)
  for _, sig in ipairs(idle) do retire_signature(P, sig) end
  return #idle
end

function H.retire_class(P, class)
  for _, sig in ipairs(redis.call('HKEYS', P .. 'fits:' .. class)) do redis.call('SREM', P .. 'classes:' .. sig, class) end
  for _, w in ipairs(redis.call('ZRANGE', P .. 'idle:' .. class, 0, -1)) do H.idle_remove(P, class, w) end
  redis.call('DEL', P .. 'fits:' .. class)
  redis.call('SREM', P .. 'idleclasses', class)
  redis.call('HDEL', P .. 'classcaps', class)
  redis.call('ZREM', P .. 'classseen', class)
  redis.call('INCR', P .. 'classes_version')
end

function H.forget_worker(P, w)
  local class, node = unpack(redis.call('HMGET', P .. 'worker:' .. w, 'class', 'node'))
  if class then H.idle_remove(P, class, w) end
  if node then redis.call('SREM', P .. 'siblings:' .. node, w) end
  redis.call('ZREM', P .. 'workers', w)
  redis.call('ZREM', P .. 'rung', w)
  redis.call('HDEL', P .. 'rungsig', w)
  redis.call('DEL', P .. 'worker:' .. w, P .. 'inbox:' .. w, P .. 'deaths:' .. w, P .. 'samples:' .. w)
end

-- a result that is past its own, shorter retention
function H.fade(P, id)
  redis.call('HDEL', H.job(P, id), 'result')
  redis.call('DEL', P .. 'pages:' .. id)
end

-- a message's time is its record's, another job's is its result's; whether the record left
function H.expired(P, id)
  if redis.call('HGET', H.job(P, id), 'kind') == 'message' then return H.leave(P, id) end
  redis.call('ZREM', P .. 'expiring', id)
  H.fade(P, id)
  return false
end

-- all keys of a finished job
function H.purge(P, id)
  local j = H.load(P, id)
  redis.call('ZREM', P .. 'jobs:final', id)
  redis.call('ZREM', P .. 'expiring', id)
  if not j or not H.FINAL[j.state] then return end
  if j.count ~= '' then H.forget_array(P, id) end
  for attempt = 1, j.count == '' and tonumber(j.attempt) or 0 do
    for rank = 0, tonumber(j.ranks ~= '' and j.ranks or '1') - 1 do
      redis.call('DEL', P .. 'log:' .. id .. ':' .. attempt .. ':' .. rank)
    end
  end
  local idem = redis.call('HGET', H.job(P, id), 'idem')
  if idem then redis.call('DEL', P .. 'idem:' .. idem) end
  redis.call('ZREM', P .. 'jobs:' .. j.state, id)
  redis.call('ZREM', P .. 'dead:' .. j.queue, id)
  redis.call('DEL', H.job(P, id), P .. 'watchers:' .. id)
end

-- a finished job leaves, unless its dependents have still to be told how it ended
function H.leave(P, id)
  if redis.call('SISMEMBER', P .. 'releasing', id) == 1 then return false end
  H.purge(P, id)
  return true
end
